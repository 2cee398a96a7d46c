"""Know before you run: what a model costs, what to choose, and what a pod that is not here would hold and send."""
