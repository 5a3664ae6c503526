"""Training on several machines and as the job of a cluster: launchers, the agents of nodes, and how these find each other."""
