"""A script of accelerate's own tests, from its wheel, to its end; each line that it prints counts as a step.

`accelerate_script.py NAME [TEST ...]`: without those of its tests.
"""

import builtins
import importlib
import sys

from accelerate import PartialState
from steps import finish, note
from torch.nn.parallel import DistributedDataParallel

lines = []
original = getattr(print, "original", print)  # a process may run this again
make_ddp = getattr(DistributedDataParallel, "original", DistributedDataParallel.__init__)


def print_and_count(*words, **options):
    original(*words, **options)
    lines.append(words)
    note(len(lines))


def leave_out_gpu(self, module, device_ids=None, output_device=None, **options):
    make_ddp(self, module, **options)


print_and_count.original = original
builtins.print = print_and_count
DistributedDataParallel.original, DistributedDataParallel.__init__ = make_ddp, leave_out_gpu
assert PartialState().num_processes == 2
note(0)
script = importlib.import_module(f"accelerate.test_utils.scripts.{sys.argv[1]}")
for name in sys.argv[2:]:
    setattr(script, name, lambda *_: None)
sys.argv[1:] = []
script.main()
finish("passed")
