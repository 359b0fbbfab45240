//! The doors: each the only code that knows its wire format.

pub mod admin;
pub mod grpc;
pub mod http;
pub mod proxy;
pub mod resp;
