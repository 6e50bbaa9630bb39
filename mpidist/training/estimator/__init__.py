"""`Estimator`: a model function and a folder, trained, evaluated and asked under any strategy; one noun a file."""
