"""No common launch: the layer runs the norm and the router."""

norm_route = None
