"""Small models on random data, so that what is timed is the same work: of the three kinds that PCcheck was measured
with, and a recommender, whose tables are large for what an iteration computes."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import count
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 2000
LENGTH = 32
IMAGE = 32
WIDTH = 256
TABLES = 8
ROW = 64
LOOKUPS = 4


class Vision(nn.Module):
    """Convolutions and two wide linear layers, which hold most parameters, as in VGG."""

    def __init__(self, params: int) -> None:
        super().__init__()
        hidden = max(16, (params - 24_000) // (64 * 16 + 10))
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Loss."""
        return F.cross_entropy(self.classifier(self.features(images)), labels)


class Transformer(nn.Module):
    """An encoder with a masked-token loss (``causal`` False, BERT) or a decoder with a next-token loss (True, OPT)."""

    def __init__(self, params: int, causal: bool) -> None:
        super().__init__()
        layers = max(1, (params - VOCABULARY * WIDTH) // (12 * WIDTH * WIDTH))
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        activation = "relu" if causal else "gelu"
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, activation, batch_first=True, norm_first=causal)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if causal else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss."""
        hidden = self.tokens(tokens) + self.places.weight
        hidden = self.layers(hidden, mask=self.mask, is_causal=self.mask is not None)
        return F.cross_entropy((hidden @ self.tokens.weight.T).flatten(0, 1), targets.flatten())


class Recommender(nn.Module):
    """Embedding tables, which hold nearly all parameters and of which a sample takes a few rows, as in DLRM."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.rows = max(1, params // (TABLES * ROW))
        self.tables = nn.ModuleList(nn.EmbeddingBag(self.rows, ROW, mode="sum", sparse=True) for _ in range(TABLES))
        self.top = nn.Sequential(nn.Linear(TABLES * ROW, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, places: Tensor, labels: Tensor) -> Tensor:
        """Loss. ``places``: in [0, 1), of ``LOOKUPS`` rows of each table."""
        rows = (places * self.rows).long()
        found = torch.cat([table(rows[i]) for i, table in enumerate(self.tables)], dim=1)
        return F.binary_cross_entropy_with_logits(self.top(found).flatten(), labels)


class Training:
    """A model of about ``params`` parameters and AdamW, or SGD for a recommender's sparse gradients.

    ``step`` does one iteration of ``batch`` samples.
    """

    def __init__(self, kind: str, params: int, batch: int) -> None:
        torch.manual_seed(0)
        make, self._draw = _KINDS[kind]
        self.model = make(params)
        self.optimizer: torch.optim.Optimizer
        if isinstance(self.model, Recommender):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = batch

    def step(self) -> None:
        """One iteration."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(*self._draw(self._batch)).backward()
        self.optimizer.step()

    def iteration_s(self, iterations: int = 9) -> float:
        """Seconds of an iteration, measured now."""
        self.step()
        return statistics.median(seconds(self.step) for _ in range(iterations))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        rng = torch.get_rng_state()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": rng}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])

    @property
    def nbytes(self) -> int:
        """Of a checkpoint: parameters, and AdamW's two moments."""
        each = 3 if isinstance(self.optimizer, torch.optim.AdamW) else 1
        return each * sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


def seconds(action: Callable[[], object]) -> float:
    """That a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def add_training_options(parser: argparse.ArgumentParser, params: int, batch: int) -> None:
    """``--model``, ``--params`` and ``--batch``."""
    parser.add_argument("--model", choices=KINDS, default="opt")
    parser.add_argument("--params", type=count, default=params, help="about")
    parser.add_argument("--batch", type=count, default=batch, help="samples of an iteration")


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, IMAGE, IMAGE), torch.randint(10, (batch,))


def _tokens(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (batch, LENGTH)), torch.randint(VOCABULARY, (batch, LENGTH))


def _clicks(batch: int) -> tuple[Tensor, Tensor]:
    return torch.rand(TABLES, batch, LOOKUPS), torch.randint(2, (batch,)).float()


_KINDS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "vision": (Vision, _images),
    "bert": (lambda params: Transformer(params, causal=False), _tokens),
    "opt": (lambda params: Transformer(params, causal=True), _tokens),
    "recommender": (Recommender, _clicks),
}
KINDS = tuple(_KINDS)
