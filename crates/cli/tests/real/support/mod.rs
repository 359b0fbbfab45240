//! Programs under test: started, listened to, and ended with the test.

mod envoy;
mod http;
mod process;
mod scratch;
mod server;

pub(crate) use self::{
    envoy::Envoy,
    http::{Answer, Ask},
    process::{Process, free_port, run, tool},
    scratch::Scratch,
    server::{EVERY_DOOR, Server, repository, tidegate},
};
