"""Estimators of a label from vectors: ridge and logistic regression, partial least squares, class means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from llmgeom.errors import UserError
from llmgeom.stats import ridge_probe
from llmgeom.stats.ridge_probe import Readout, residuals, standardised

Name = Literal["ridge", "logistic", "means", "pls"]
PENALTIES = 10.0 ** np.arange(-3, 1)  # of logistic regression, per row
COMPONENTS = (1.0, 2.0, 3.0, 5.0, 8.0)  # of partial least squares: fewer components act as a larger penalty
# (standardised rows, label column, new rows, penalty, weights of the rows) -> predictions of the new rows
Fit = Callable[[np.ndarray, np.ndarray, np.ndarray, float, np.ndarray], np.ndarray]


def logistic(z: np.ndarray, y: np.ndarray, new: np.ndarray, penalty: float, weight: np.ndarray) -> np.ndarray:
    """Probability of 1, by scikit-learn's LogisticRegression: mean log loss + penalty |w|^2 / 2, free intercept."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=1 / (penalty * weight.sum()), max_iter=1000).fit(z, y > 0.5, weight)
    return fitted.predict_proba(new)[:, 1]


def partial_least_squares(
    z: np.ndarray, y: np.ndarray, new: np.ndarray, components: float, weight: np.ndarray
) -> np.ndarray:
    """Least squares on the first components of partial least squares (Wold 1975), for one label and weighted rows.

    Each component is the score t = z w with w = z' (y - mean); it is projected out of z and y before the next. For a
    binary label the first one lies along the difference of class means. With equal weights the predictions are those
    of scikit-learn's PLSRegression, which takes no weights.
    """
    root = np.sqrt(weight)
    mean, centre = np.average(y, weights=weight), np.average(z, 0, weight)
    x, left, fresh = (z - centre) * root[:, None], (y - mean) * root, new - centre
    prediction, least = np.full(len(new), mean), 1e-20 * float(np.square(x).sum()) ** 2 * float(left @ left)
    for _ in range(int(components)):
        weights = x.T @ left
        along, score = x @ weights, fresh @ weights
        if (length := float(along @ along)) <= least:  # no coordinate covaries with the residual label
            break
        loading, slope = x.T @ along / length, float(left @ along) / length
        prediction += slope * score
        x, fresh, left = x - np.outer(along, loading), fresh - np.outer(score, loading), left - slope * along
    return prediction


def log_loss(y: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """Log loss of each row, nats."""
    p = np.clip(prediction, 1e-12, 1 - 1e-12)
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


def squared(y: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """Squared error of each row."""
    return np.square(y - prediction)


@dataclass(frozen=True)
class Estimator:
    """An estimator of a label: `fit` with the one of `penalties` that has the least mean `loss` in the inner folds."""

    fit: Fit
    loss: Callable[[np.ndarray, np.ndarray], np.ndarray]
    penalties: tuple[float, ...]

    def read(
        self,
        x: Float[np.ndarray, "row coordinate"],
        y: Float[np.ndarray, "row column"],
        fold: Int[np.ndarray, " row"],
        confounds: Float[np.ndarray, "row confound"] | None = None,
        weight: Float[np.ndarray, " row"] | None = None,
    ) -> Readout:
        """Held-out predictions as by `ridge_probe.read`, with this estimator, for each column of y separately.

        Raises UserError: a column is constant outside a fold, or values are not finite.
        """
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise UserError("a label cannot be predicted from values that are not finite; drop those rows")
        folds, weight = int(fold.max()) + 1, np.ones(len(x)) if weight is None else weight
        prediction, penalty, error = np.empty(y.shape), np.empty((folds, y.shape[1])), np.empty((folds, y.shape[1]))
        for place in range(folds):
            out, rest = fold == place, fold != place
            residual, w = residuals(x, confounds, rest, weight), weight[rest]
            z, new = standardised(residual[rest], residual[out], w)
            z, new = (part * np.sqrt(z.any(0).sum()) for part in (z, new))  # to sd 1, as scikit-learn scales
            for column in range(y.shape[1]):
                truth = y[rest, column]
                if truth.max() == truth.min():
                    raise UserError(f"the label is constant over {rest.sum()} rows: nothing can be learnt from them")
                losses = [self._inner(z, truth, fold[rest], one, w) for one in self.penalties]
                best = int(np.argmin(losses))
                penalty[place, column], error[place, column] = self.penalties[best], losses[best]
                prediction[out, column] = self.fit(z, truth, new, self.penalties[best], w)
        return Readout(y, prediction, fold, penalty, error)

    def _inner(self, z: np.ndarray, y: np.ndarray, fold: np.ndarray, penalty: float, weight: np.ndarray) -> float:
        """Mean loss of all rows, each fold held out in turn; infinite if the label is constant outside a fold."""
        prediction = np.empty(len(y))
        for one in np.unique(fold):
            out = fold == one
            if y[~out].max() == y[~out].min():
                return np.inf
            prediction[out] = self.fit(z[~out], y[~out], z[out], penalty, weight[~out])
        return float(np.average(self.loss(y, prediction), weights=weight))


ESTIMATORS: dict[str, Estimator] = {
    "logistic": Estimator(logistic, log_loss, tuple(PENALTIES.tolist())),
    "means": Estimator(partial_least_squares, squared, COMPONENTS[:1]),
    "pls": Estimator(partial_least_squares, squared, COMPONENTS),
}


def reader(name: Name) -> Callable[..., Readout]:
    """The `read` of the estimator with this name."""
    return ridge_probe.read if name == "ridge" else ESTIMATORS[name].read
