//! Tests the tower layer, around services that record their requests.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod ends;
mod grpc;
mod model;
mod places;
mod queue;
mod routes;
mod spoofing;
mod stores;
mod support;
