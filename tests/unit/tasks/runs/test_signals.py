import os
import signal
import time

import pytest

from infini_llama.tasks.runs.signals import ONE_REQUEST_SECONDS, raises_once


class Asked(BaseException):
    pass


def test_what_follows_within_a_second_is_the_same_request_and_a_later_one_is_not():
    before = signal.signal(signal.SIGTERM, raises_once(Asked))
    try:
        with pytest.raises(Asked):
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ONE_REQUEST_SECONDS + 0.1)
        with pytest.raises(Asked):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
