"""The default predictor: a roofline model fitted to measured modes, and a Gaussian process on its residuals."""
