//! Programs under test, which are stopped when the test ends.

mod authority;
mod browser;
mod envoy;
mod http;
mod process;
mod scratch;
mod server;

pub(crate) use self::{
    authority::{authority, signed},
    browser::Browser,
    envoy::{Envoy, envoy_program},
    http::{Answer, Ask, count_admitted},
    process::{Process, assert_script_passes, run, tool},
    scratch::Scratch,
    server::{EVERY_LISTENER, Server, repository, tidegate},
};
