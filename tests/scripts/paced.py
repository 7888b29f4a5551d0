"""`paced.py SCRIPT ARGUMENTS`: a training of which twenty steps last a second at least, so that a scrape a second sees them."""

import runpy
import sys
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

register_optimizer_step_post_hook(lambda *_: time.sleep(0.05))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
