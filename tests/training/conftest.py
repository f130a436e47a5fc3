"""What tests of the training programs share."""

from doubles.threads import one_thread as one_thread
