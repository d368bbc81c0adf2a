"""Predictions of a label by scikit-learn's nested search."""

import numpy as np
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV, PredefinedSplit
from sklearn.preprocessing import StandardScaler

from llmgeom.stats import ridge_probe


def sklearn_predictions(x, y, fold, confounds=None):
    """Nested cross-validation by scikit-learn's own parts: scaled outside a fold, penalty by grid search within."""
    prediction = np.empty(len(y))
    for held in np.unique(fold):
        out, rest = fold == held, fold != held
        own = x
        if confounds is not None:
            own = x - LinearRegression().fit(confounds[rest], x[rest]).predict(confounds)
        scaler = StandardScaler().fit(own[rest])
        # Ours divides by the number of coordinates, so that a penalty means the same at every width.
        grid = {"alpha": ridge_probe.PENALTIES * x.shape[1]}
        search = GridSearchCV(Ridge(), grid, cv=PredefinedSplit(fold[rest]), scoring="neg_mean_squared_error")
        search.fit(scaler.transform(own[rest]), y[rest])
        prediction[out] = search.predict(scaler.transform(own[out]))
    return prediction
