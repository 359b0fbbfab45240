//! The listeners. For each wire format, one module contains all code that depends on it.

pub mod admin;
mod cross_site;
pub mod http;
pub mod resp;
mod top;
