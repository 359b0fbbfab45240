//! Envoy's rate limit service: the cases of every `envoy*.yaml` of the project's `vectors/` folder, or of the one that the
//! environment variable `TIDEGATE_VECTORS` names, put to the service and to every door that leads to it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod cases;
mod compare;
mod corrected;
mod format;
mod runner;
mod subject;
