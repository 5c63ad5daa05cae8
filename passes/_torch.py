"""Every private or moving name of torch that the compiler needs, each with the reason it has no public stand-in.

``tests/test_torch_names.py`` imports this module and checks each name, so that a release of torch that moves one fails
there first, by name.
"""

from __future__ import annotations

import torch

# Where Dynamo's own frames are, so that the user's above them can be found on the stack.
from torch._dynamo import convert_frame, eval_frame

# AOTAutograd as a backend factory, documented for authors of backends but kept in a private package.
from torch._dynamo.backends.common import aot_autograd

# Why a graph ends where it does; and how the rest of a function after a break is called.
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX as RESUMED

# The only capture that stops above autograd (so that the rewritten graph can still be differentiated) and hands back a
# functional graph without wrapping it for deployment, as torch.export does.
# What AOTAutograd offers to authors of backends; re-exported by functorch.compile, which has no types.
from torch._functorch.aot_autograd import aot_export_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

# The fake mode of the values in a graph; values of the rewritten graph must live in the same one.
# Dynamo keeps here what it knows while a backend runs: which frame it compiles (it may start anew and call the backend
# again for the same one), the shape environment, the fake mode.
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing

# The higher-order op behind torch.utils.checkpoint in a graph.
from torch._higher_order_ops.wrap import tag_activation_checkpoint as checkpoint

# What the modes of `torch.compile` mean to Inductor; documented, in a private package.
from torch._inductor import list_mode_options

# `torch.compile(backend="inductor")` resolves to this function; the public way in takes no per-call configuration that
# also holds for the backward, which is compiled later.
from torch._inductor.compile_fx import compile_fx

# Tensors with a storage but no memory, and what an op raises on them whose value or length only the data can tell.
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

# The capture opens composite ops below its own functionalization: they need one of their own.
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

# The key-value store of the default process group: the rendezvous that all ranks already share.
from torch.distributed.distributed_c10d import _get_default_store

# Traces a region that the capture cannot see through.
from torch.fx.experimental.proxy_tensor import make_fx

# Sizes as expressions, and questions about them that add no guard.
from torch.fx.experimental.symbolic_shapes import statically_known_true

# Whether a tensor is a subclass that holds plain ones and says how to take it apart (a quantised weight).
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Rebuilds an expression of sizes from values that stand for its symbols.
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = [
    "COMPOSITE",
    "CONVERT_FRAME",
    "DEPENDS_ON_DATA",
    "EVAL_FRAME",
    "RESUMED",
    "CompileContext",
    "FakeTensorMode",
    "FunctionalTensorMode",
    "PythonReferenceAnalysis",
    "TracingContext",
    "_get_default_store",
    "aot_autograd",
    "aot_export_module",
    "checkpoint",
    "compile_fx",
    "detect_fake_mode",
    "dispatch_functionalize",
    "enter_autocast",
    "enter_vmap",
    "exit_autocast",
    "is_traceable_wrapper_subclass",
    "leave_vmap",
    "list_mode_options",
    "make_boxed_func",
    "make_fx",
    "min_cut_rematerialization_partition",
    "statically_known_true",
    "sympy_interp",
    "tracing",
]

CONVERT_FRAME, EVAL_FRAME = convert_frame.__file__, eval_frame.__file__
DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)

# A captured graph marks its autocast regions with calls of these two.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast

# Marks the kernel of an op that torch defines by other ops.
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Dynamo marks the regions under vmap with calls of these two.
enter_vmap = torch._functorch.predispatch._vmap_increment_nesting
leave_vmap = torch._functorch.predispatch._vmap_decrement_nesting


def why_graph_ended(dynamo: torch.fx.GraphModule) -> GraphCompileReason | None:
    """What Dynamo notes on each graph that it hands to a backend, for ``torch._dynamo.explain`` among others."""
    return getattr(dynamo, "compile_subgraph_reason", None)
