//! The listeners. Each module is the only code that knows its wire format.

pub mod admin;
mod cross_site;
pub mod http;
pub mod resp;
mod top;
