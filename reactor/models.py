"""Which model a tenant's texts are embedded in: the environment names a target, the tenant's own comes first."""

from __future__ import annotations

from reactor.embedder import Embedder, open_embedder
from reactor.errors import Misuse, Unavailable
from reactor.settings import LOCAL_MODEL, Settings


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

    def local(self) -> Embedder:
        """The model that never leaves the machine.

        Raises:
            Unavailable: It is not installed.
        """
        return self.of_model(LOCAL_MODEL)

    async def aclose(self) -> None:
        """Close what was opened."""
        for embedder in self._open.values():
            await embedder.aclose()
