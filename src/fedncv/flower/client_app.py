"""The Flower ClientApp: makes a client from the settings of the node and the run, and returns its replies."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedncv.flower.client import Client, answer, client_of, count_samples, train_round
from fedncv.flower.secure_client import SECURE, Here, answer_stage

app = ClientApp()


def client_in(context: Context) -> Client:
    """Return the client: the node's settings give number and folder, the run's give name and study."""
    number, folder = context.node_config["client"], context.node_config["folder"]
    run, study = context.run_config["run"], context.run_config["study"]
    return client_of(str(study), str(run), int(number), Path(str(folder)), _secure(context))


def here_in(context: Context) -> Here:
    """Return the client for a stage of secure sums, which needs its samples only if it trains."""
    number, folder = context.node_config["client"], context.node_config["folder"]
    run, study = context.run_config["run"], context.run_config["study"]
    return Here(int(number), str(run), Path(str(folder)), str(study), _secure(context))


def _secure(context: Context) -> str:
    return str(context.run_config.get("secure", ""))


@app.query()
def query(message: Message, context: Context) -> Message:
    return answer(count_samples, lambda: client_in(context), message)


@app.query(SECURE)
def query_stage(message: Message, context: Context) -> Message:
    return answer(answer_stage, lambda: here_in(context), message)


@app.train(SECURE)
def train_stage(message: Message, context: Context) -> Message:
    return answer(answer_stage, lambda: here_in(context), message)


@app.train()
def train(message: Message, context: Context) -> Message:
    return answer(train_round, lambda: client_in(context), message)
