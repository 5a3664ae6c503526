"""`python -m infini_llama`: the same command as `infini-llama`."""

import sys

from infini_llama.flows.cli.main import main

sys.exit(main())
