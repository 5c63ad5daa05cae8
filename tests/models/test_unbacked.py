"""Lengths that only the data tells (the rows that a mask selects), kept in one graph as Dynamo can be told to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.ranks

MESHES = [(2, 1), (1, 2), (2, 2)]


class Selected(nn.Module):
    """Joint attention of an image and of those rows of a text that a mask selects, for each picture of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, image: Tensor, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        for qkv, out in zip(self.qkv, self.out):
            images, texts = [], []
            for i in range(image.shape[0]):
                rows = torch.nonzero(mask[i]).flatten()
                both = torch.cat([image[i : i + 1], text[i : i + 1, rows]], 1)
                q, k, v = qkv(both).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
                y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
                of_image, of_text = y.split_with_sizes([image.shape[1], y.shape[1] - image.shape[1]], 1)
                images.append(of_image)
                texts.append(nn.functional.pad(of_text, (0, 0, 0, text.shape[1] - of_text.shape[1])))
            image, text = image + out(torch.cat(images)), text + out(torch.cat(texts))
        return image, text


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
def test_one_graph_is_right_for_any_number_of_rows(ranks, ulysses, ring):
    answers = ranks(ulysses * ring).run(_selected, ulysses, ring)
    for error, _, compiles, attentions in answers:
        assert error <= 1e-12
        assert compiles == 1
        assert attentions and "whole" not in attentions
    assert len({digest for _, digest, _, _ in answers}) == 1


def _selected(ulysses: int, ring: int) -> tuple[float, str, int, list[str]]:
    from cp_compile import cp_backend
    from cp_compile.agreement import digest, relative_error

    torch.manual_seed(0)
    plain = Selected().double()
    for p in plain.parameters():
        nn.init.normal_(p, 0.0, 0.3)
    backend = cp_backend(ulysses=ulysses, ring=ring, inner="aot_eager")
    compiled = torch.compile(plain, backend=backend, fullgraph=True)
    errors: list[float] = []
    outputs: list[Any] = []
    counts = [(3, 5), (7, 1), (0, 7), (4, 2)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        for call, count in enumerate(counts):
            torch.manual_seed(call)
            image, text = torch.randn(2, 11, 16).double(), torch.randn(2, 7, 16).double()
            mask = torch.stack([torch.randperm(7) < n for n in count])
            outputs += compiled(image, text, mask)
            errors.append(relative_error(tuple(outputs[-2:]), plain(image, text, mask)))
    graphs = backend.report.to_dict()["graphs"]
    return max(errors), digest(outputs), len(graphs), [a["variant"] for a in graphs[0]["attentions"]]
