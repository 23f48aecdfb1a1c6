"""`python -m vllm_blend COMMAND ...`"""

import sys

from vllm_blend.entrypoints.cli import main

sys.exit(main())
