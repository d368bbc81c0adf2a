"""Estimators that read a label from vectors: ridge regression, logistic regression and difference of means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from llmgeom.errors import UserError
from llmgeom.stats import ridge_probe
from llmgeom.stats.ridge_probe import Readout, residuals, standardised

Name = Literal["ridge", "logistic", "means"]
PENALTIES = 10.0 ** np.arange(-3, 1)  # of logistic regression, per row
# (standardised rows, label column, new rows, penalty) -> predictions of the new rows
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]


def logistic(z: np.ndarray, y: np.ndarray, new: np.ndarray, penalty: float) -> np.ndarray:
    """Probability of 1 by scikit-learn's LogisticRegression: mean log loss + penalty |w|^2 / 2, intercept free."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=1 / (penalty * len(z)), max_iter=1000).fit(z, y > 0.5)
    return fitted.predict_proba(new)[:, 1]


def means(z: np.ndarray, y: np.ndarray, new: np.ndarray, penalty: float) -> np.ndarray:
    """Least squares on one score, z w with w = z' (y - mean): of a binary label along the difference of class means.

    It is the limit of ridge regression at an infinite penalty, with the scale of the score fitted afterwards (the first
    component of partial least squares). There is nothing to choose; the penalty is not used.
    """
    mean, centre = y.mean(), z.mean(0)
    weights = (z - centre).T @ (y - mean)
    along = (z - centre) @ weights
    length = float(along @ along)
    return mean + (new - centre) @ weights * (float(along @ (y - mean)) / length if length > 0 else 0.0)


def log_loss(y: np.ndarray, prediction: np.ndarray) -> float:
    """Mean log loss, nats."""
    p = np.clip(prediction, 1e-12, 1 - 1e-12)
    return float(-(y * np.log(p) + (1 - y) * np.log(1 - p)).mean())


def squared(y: np.ndarray, prediction: np.ndarray) -> float:
    """Mean squared error."""
    return float(np.square(y - prediction).mean())


@dataclass(frozen=True)
class Estimator:
    """How a label is read: `fit` with each of `penalties`; that with the least `loss` in the inner folds is taken."""

    fit: Fit
    loss: Callable[[np.ndarray, np.ndarray], float]
    penalties: tuple[float, ...]

    def read(
        self,
        x: Float[np.ndarray, "row coordinate"],
        y: Float[np.ndarray, "row column"],
        fold: Int[np.ndarray, " row"],
        confounds: Float[np.ndarray, "row confound"] | None = None,
    ) -> Readout:
        """What `ridge_probe.read` does, by this estimator: each column of y alone.

        Raises:
            UserError: a column that is constant outside a fold, and values that are not finite.
        """
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise UserError("a label cannot be read from values that are not finite; drop those rows")
        folds = int(fold.max()) + 1
        prediction, penalty, error = np.empty(y.shape), np.empty((folds, y.shape[1])), np.empty((folds, y.shape[1]))
        for held in range(folds):
            out, rest = fold == held, fold != held
            residual = residuals(x, confounds, rest)
            z, new = standardised(residual[rest], residual[out])
            z, new = z * np.sqrt(z.shape[1]), new * np.sqrt(z.shape[1])  # to sd 1, as scikit-learn scales
            for column in range(y.shape[1]):
                own = y[rest, column]
                if own.max() == own.min():
                    raise UserError(f"the label is constant over {rest.sum()} rows: nothing can be learnt from them")
                losses = [self._inner(z, own, fold[rest], one) for one in self.penalties]
                best = int(np.argmin(losses))
                penalty[held, column], error[held, column] = self.penalties[best], losses[best]
                prediction[out, column] = self.fit(z, own, new, self.penalties[best])
        return Readout(y, prediction, fold, penalty, error)

    def _inner(self, z: np.ndarray, y: np.ndarray, fold: np.ndarray, penalty: float) -> float:
        """Loss over all rows when the folds are held out in turn; infinite where a label is constant without one."""
        held = np.empty(len(y))
        for one in np.unique(fold):
            out = fold == one
            if y[~out].max() == y[~out].min():
                return np.inf
            held[out] = self.fit(z[~out], y[~out], z[out], penalty)
        return self.loss(y, held)


ESTIMATORS: dict[str, Estimator] = {
    "logistic": Estimator(logistic, log_loss, tuple(PENALTIES.tolist())),
    "means": Estimator(means, squared, (1.0,)),
}


def read(
    name: Name,
    x: Float[np.ndarray, "row coordinate"],
    y: Float[np.ndarray, "row column"],
    fold: Int[np.ndarray, " row"],
    confounds: Float[np.ndarray, "row confound"] | None = None,
) -> Readout:
    """Held-out predictions by the estimator of this name."""
    if name == "ridge":
        return ridge_probe.read(x, y, fold, confounds)
    return ESTIMATORS[name].read(x, y, fold, confounds)
