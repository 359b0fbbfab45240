//! The listeners. All code that depends on a wire format is in one module.

pub mod admin;
mod cross_site;
pub mod http;
pub mod resp;
pub mod spop;
mod top;
