"""A small GPT on bytes and the text that it learns: plain PyTorch."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 256
LAYERS = 4
_HEAD_WIDTH = 32


class GPT(nn.Module):
    """Decoder-only transformer; forward maps tokens [batch, time] and targets [batch, time] to the mean loss."""

    def __init__(self, params: int, block: int, dropout: float = 0.1) -> None:
        super().__init__()
        width = _width(params)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(_Layer(width, dropout) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        logits = self.head(self.norm(self.layers(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = width // _HEAD_WIDTH
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.drop(self.project(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


def _width(params: int) -> int:
    """Layers hold 12 width² parameters each; the result is the multiple of a head's width that comes closest."""
    return max(1, round((params / (12 * LAYERS)) ** 0.5 / _HEAD_WIDTH)) * _HEAD_WIDTH


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Text(Dataset[tuple[Tensor, Tensor]]):
    """All files of a folder as bytes, cut into windows of ``block`` tokens; a sample is (tokens, next tokens)."""

    def __init__(self, folder: Path, block: int) -> None:
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()]
        self._bytes = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        self._block = block

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._block
        window = self._bytes[start : start + self._block + 1].long()
        return window[:-1], window[1:]
