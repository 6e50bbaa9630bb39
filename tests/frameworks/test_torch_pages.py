"""The pages and the examples of PyTorch run, on any number of ranks, to the same numbers."""

from __future__ import annotations

import importlib.util
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.frameworks.torch_models import world  # noqa: E402
from tests.helpers.pages import ROOT, blocks  # noqa: E402

pytestmark = pytest.mark.mpi

BLOCKS = [block for block in blocks() if block.how == "torch"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_example_of_a_page_runs(block):
    names = {"__name__": "__main__"}
    exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)
    trained = names["model"].parameters() if "model" in names else []
    parameters = b"".join(each.detach().numpy().tobytes() for each in trained)
    assert len({*world().exchange(parameters)}) == 1


def test_the_pages_have_examples():
    assert {block.page.name for block in BLOCKS} >= {"torch.md", "coming-from-horovod.md", "coming-from-ddp.md"}


def example(name):
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_the_net_of_the_digits_learns():
    pytest.importorskip("sklearn")
    assert example("torch_digits").main(["--epochs", "3"]) > 0.88


def test_the_writer_learns_the_same_on_any_number_of_ranks():
    """The losses of one process, by the same steps on whole batches."""
    module = example("torch_text")
    found = module.main(["--steps", "6"])
    torch.manual_seed(0)
    numbers, symbols = module.text()
    model = module.Writer(len(symbols))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(6):
        x, y = module.batch(numbers, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).mT, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert found == pytest.approx(sum(losses) / 6, rel=2e-5)
