"""Files for ``ray up``, one a kind of cluster."""
