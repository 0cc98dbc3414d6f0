"""Making heads for exits: hidden states of text are kept, and heads are trained on them. The trunk stays as it is."""
