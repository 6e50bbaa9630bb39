"""What is assumed about PyTorch and is not in its documentation; each test says what would break."""

from __future__ import annotations

import inspect
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.mpi


def test_the_private_names_of_pytorch_are_what_they_were():
    """A function that is queued in a pass is called at its end, and each pass has a number of its own."""
    found, numbers = [], []
    weight = torch.nn.Parameter(torch.ones(2))

    def accumulated(parameter):
        numbers.append(torch._C._current_graph_task_id())
        torch.autograd.Variable._execution_engine.queue_callback(lambda: found.append(parameter.grad.tolist()))

    weight.register_post_accumulate_grad_hook(accumulated)
    for turn in (1, 2):
        (weight * 2).sum().backward()
        assert found == [[2.0, 2.0], [4.0, 4.0]][:turn]
    assert len({*numbers}) == 2 and torch._C._current_graph_task_id() == -1


def test_what_pytorch_says_of_a_pass_inside_a_pass():
    """At its end there is a node, that of the outer pass; functions of the nodes behind it run in the outer pass."""
    from torch.utils.checkpoint import checkpoint

    found, nodes = [], []
    weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)

    def over():
        node = torch._C._current_autograd_node()
        nodes.append(node)
        if node is not None:
            node.next_functions[0][0].register_prehook(lambda *_: found.append(torch._C._current_graph_task_id()))

    def accumulated(parameter):
        found.append(torch._C._current_graph_task_id())
        torch.autograd.Variable._execution_engine.queue_callback(over)

    weight.register_post_accumulate_grad_hook(accumulated)
    (checkpoint(lambda x: x * weight, x, use_reentrant=True) * 2).sum().backward()
    assert len(nodes) == 1 and nodes[0] is not None and found[1] == found[0] - 1
    (x.detach() * weight).sum().backward()
    assert len(nodes) == 2 and nodes[1] is None


def test_tensors_count_their_changes():
    """Else gradients that a user has changed after the reduction are not seen."""
    tensor = torch.zeros(3)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1
    tensor[0] = 7
    assert tensor._version == before + 2


def test_an_optimizer_has_hooks_when_it_is_made():
    """Else every optimizer is refused as one that was not made by PyTorch's own constructor."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert hasattr(optimizer, "_optimizer_step_pre_hooks")
    assert not hasattr(torch.optim.SGD.__new__(torch.optim.SGD), "_optimizer_step_pre_hooks")


def test_a_module_has_tables_of_its_parts():
    """Else a parameter that a module gets after it was distributed is not seen."""
    module = torch.nn.Linear(2, 1)
    assert [*module._parameters] == ["weight", "bias"] and [*module._modules] == []
    module.later = torch.nn.Linear(1, 1)
    module.own = torch.nn.Parameter(torch.zeros(1))
    assert module._modules["later"] is module.later and module._parameters["own"] is module.own


def test_a_module_loads_its_part_of_a_state():
    """Else a module around a DistributedDataParallel does not load its own state, or loses the versions of layers."""
    found = []

    class Renaming(torch.nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, own, *args):
            load = inspect.currentframe().f_back
            found.append((prefix, sorted(state_dict)))
            assert load.f_globals["__name__"] == torch.nn.Module.__module__
            assert load.f_locals["metadata"] is versions and own is versions["0"]
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}other")
            super()._load_from_state_dict(state_dict, prefix, own, *args)

    module = torch.nn.Sequential(Renaming(2, 1, bias=False), torch.nn.Identity())
    given = OrderedDict({"0.other": torch.full((1, 2), 3.0)})
    versions = given._metadata = module.state_dict()._metadata
    assert versions == {"": {"version": 1}, "0": {"version": 1}, "1": {"version": 1}}
    module.load_state_dict(given)
    assert module[0].weight.tolist() == [[3.0, 3.0]] and [*given] == ["0.other"]
    assert found == [("0.", ["0.other"])]


def test_layers_of_batch_normalization_have_a_class_in_common():
    """Else some of them are not replaced by those that are synchronized."""
    from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

    kinds = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm
    assert all(issubclass(kind, _BatchNorm) for kind in kinds)
    assert not issubclass(torch.nn.LayerNorm, _BatchNorm)
    assert isinstance(torch.nn.LazyBatchNorm1d(), _LazyNormBase) and not issubclass(torch.nn.BatchNorm1d, _LazyNormBase)


def test_a_scaler_tells_an_optimizer_of_infinities():
    """Else a step cannot tell that a scaler has looked for them among gradients that are not reduced."""
    weight, found = torch.nn.Parameter(torch.ones(2)), []

    class Noting(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            found.append(self.found_inf.item())

    optimizer, scaler = Noting([weight], lr=0.1), torch.amp.GradScaler("cpu")
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert found == [0.0, 1.0] and not hasattr(optimizer, "found_inf")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_layer_has_the_name_of_its_class():
    """Else a compiled layer of batch normalization stays with the statistics of its rank."""
    assert torch.jit.script(torch.nn.BatchNorm1d(3)).original_name == "BatchNorm1d"


def test_where_communication_hooks_are():
    """Else hooks of PyTorch are refused."""
    hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    for name in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"):
        hook = getattr(hooks, name)
        assert hook.__module__ == "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        assert hook.__name__ == name
