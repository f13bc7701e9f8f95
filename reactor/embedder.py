"""What an embedder is.

Every vector is float32, of shape (1024,) and unit norm; a model with fewer dimensions is padded with zeros, which
leaves cosines as they are. No error and no log event carries a text, a vector, a key, a URL or an answer's body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from reactor.errors import Permanent

DIMENSIONS = 1024

Vector: TypeAlias = npt.NDArray[np.float32]
InputType: TypeAlias = Literal["document", "query"]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What became of some texts, in their order.

    Attributes:
        vectors: One per text, float32 of shape (1024,) and unit norm; None where the text was refused.
        refused: Index of a text to the reason why no vector can be had for it, now or later.
        tokens: What the provider billed; 0 for a local model.
    """

    vectors: list[np.ndarray | None]
    refused: dict[int, Permanent]
    tokens: int


class Embedder(Protocol):
    """One model, for documents and for the queries that shall find them."""

    @property
    def model(self) -> str:
        """The name stored beside every vector: vectors of two models never meet in a search."""

    async def embed_documents(self, texts: Sequence[str]) -> Embeddings:
        """Embed any number of texts, none of them blank.

        Raises:
            Unavailable: The provider is out of reach, slow, or asks to wait (`retry_after_s`); no text is to blame.
        """

    async def embed_query(self, text: str) -> np.ndarray:
        """Embed a question: float32 of shape (1024,), unit norm.

        Raises:
            Unavailable: The provider is out of reach, slow, or asks to wait (`retry_after_s`).
            Permanent: No vector can be had for this text.
        """

    async def warm(self) -> None:
        """Load what is heavy, so that the first query is fast. Calls nobody."""

    async def aclose(self) -> None:
        """Let go of connections and of the model. A later call opens them again."""


def unit(row: np.ndarray) -> Vector:
    """`row` at length one, padded with zeros to (1024,).

    Raises:
        ValueError: It has no direction: zero, NaN or infinite.
    """
    wide = row.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(wide))
    if not np.isfinite(norm) or norm < 1e-12:  # noqa: PLR2004 - nothing but rounding is left of such a vector
        raise ValueError("no direction")
    vector = np.zeros(DIMENSIONS, dtype=np.float32)
    vector[: wide.size] = wide / norm
    return vector


def encoded(text: str) -> bytes:
    """UTF-8 of a text that may hold what has none."""
    return text.encode("utf-8", "replace")  # a lone surrogate has no UTF-8


def packed(items: Iterable[int], size_of: Callable[[int], int], *, most: int, budget: int) -> Iterator[list[int]]:
    """`items` in order, in groups of at most `most` and together within `budget`; a bigger item goes alone."""
    group: list[int] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if group and (len(group) == most or filled + size > budget):
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group
