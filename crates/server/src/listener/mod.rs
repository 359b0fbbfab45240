//! The listeners. The code for each wire format is in a single module.

pub mod admin;
mod cross_site;
pub mod http;
pub mod resp;
pub mod spop;
mod top;
