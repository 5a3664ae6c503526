"""What the nodes of an attempt tell each other."""

from infini_llama.tasks.records.record import Record


class Endpoint(Record):
    """rendezvous.json of an attempt: where torchrun of the leading node listens for the others; host: its name."""

    address: str
    port: int
    host: str
