//! Tests of the rules file, section by section.
#![allow(clippy::unwrap_used, reason = "a panic shows where a test failed")]

mod answers;
mod body_cost;
mod dead_conditions;
mod denials;
mod file;
mod grpc;
mod listeners;
mod plans;
mod proxy;
mod redis;
mod rules;
mod schedule;
mod shutdown;
mod watching;

use tidegate_config::Config;

/// A section `proxy` with one upstream.
const PROXY: &str =
    "proxy: {listen: '127.0.0.1:0', upstreams: [{name: app, urls: 'http://127.0.0.1:3000'}]}\n";

/// Returns every error in an invalid file.
fn mistakes(text: &str) -> Vec<String> {
    let mistakes = Config::parse(text).unwrap_err();
    mistakes.iter().map(ToString::to_string).collect()
}

/// Returns every warning for a valid file.
fn warnings(text: &str) -> Vec<String> {
    let warnings = Config::parse(text).unwrap().warnings;
    warnings.iter().map(ToString::to_string).collect()
}
