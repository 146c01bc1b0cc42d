"""Estimators as pure functions on tensors: the paper's rules, the centred ones, and their coefficients."""

from fedncv.estimators.coefficients import (
    Moments,
    leave_one_out_betas,
    linearised_units,
    no_moments,
    observe,
    optimal_beta,
    running_beta,
    squared_correlation,
)
from fedncv.estimators.control_variate import (
    centred,
    controlled,
    horvitz_thompson_weights,
    self_normalised_weights,
    server_estimate,
)
from fedncv.estimators.draws import design_covariance, uniform_covariance, uniform_joint_inclusion
from fedncv.estimators.drift import drift_corrections, learned_alpha, raw_gradient, recentring, smoothed
from fedncv.estimators.labels import Slopes, calibrated_weights, no_slopes, observe_labels, predicted, slopes
from fedncv.estimators.leave_one_out import leave_one_out_mean
from fedncv.estimators.literal import (
    alpha_step,
    client_gradient,
    networked_gradient,
    reshaped_gradients,
    sample_weights,
    server_gradient,
    server_weights,
)
from fedncv.estimators.memory import WeightedSum, replace_rows, weighted_mean, weighted_sum
from fedncv.estimators.sample_table import Table, new_table, saga_direction, svrg_direction
from fedncv.estimators.score_function import (
    bernoulli_outcomes,
    bernoulli_score,
    double_control_variate,
    reinforce,
    rloo,
)

__all__ = [
    "Moments",
    "Slopes",
    "Table",
    "WeightedSum",
    "alpha_step",
    "bernoulli_outcomes",
    "bernoulli_score",
    "calibrated_weights",
    "centred",
    "client_gradient",
    "controlled",
    "design_covariance",
    "double_control_variate",
    "drift_corrections",
    "horvitz_thompson_weights",
    "learned_alpha",
    "leave_one_out_betas",
    "leave_one_out_mean",
    "linearised_units",
    "networked_gradient",
    "new_table",
    "no_moments",
    "no_slopes",
    "observe",
    "observe_labels",
    "optimal_beta",
    "predicted",
    "raw_gradient",
    "recentring",
    "reinforce",
    "replace_rows",
    "reshaped_gradients",
    "rloo",
    "running_beta",
    "saga_direction",
    "sample_weights",
    "self_normalised_weights",
    "server_estimate",
    "server_gradient",
    "server_weights",
    "slopes",
    "smoothed",
    "squared_correlation",
    "svrg_direction",
    "uniform_covariance",
    "uniform_joint_inclusion",
    "weighted_mean",
    "weighted_sum",
]
