"""The Flower ClientApp: makes a client from the settings of the node and the run, and returns its replies."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedncv.flower.client import Client, client_of, count_samples, train_round
from fedncv.flower.errors import told

app = ClientApp()


def client_in(context: Context) -> Client:
    """Return the client: the node's settings give number and folder, the run's give name and study."""
    number, folder = context.node_config["client"], context.node_config["folder"]
    run, study = context.run_config["run"], context.run_config["study"]
    return client_of(str(study), str(run), int(number), Path(str(folder)))


@app.query()
def query(message: Message, context: Context) -> Message:
    with told():
        return count_samples(client_in(context), message)


@app.train()
def train(message: Message, context: Context) -> Message:
    with told():
        return train_round(client_in(context), message)
