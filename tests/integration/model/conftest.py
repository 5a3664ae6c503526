"""Small models, on one thread, from the same seed."""

from support.models import config as config
from support.models import one_thread as one_thread
