//! Tests the rate limit layer around services that record their requests.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod grpc;
mod leases;
mod model;
mod queue;
mod responses;
mod routes;
mod settlement;
mod spoofing;
mod stores;
mod support;
mod waiting;
