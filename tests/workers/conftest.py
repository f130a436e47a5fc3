"""What tests of the workers share."""

from doubles.threads import one_thread as one_thread
