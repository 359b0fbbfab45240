//! Parses and validates the rules file.
//!
//! [`Config::parse`] reads the whole file and reports all errors at once, each with its path in the
//! file and its line. The result needs no further validation: addresses and limits are parsed, and
//! rules are indexed. Parsing does not read environment variables, and does not open files or
//! sockets. The code that starts the server reads environment variables and opens files and
//! sockets. [`Config::read`] reads the rules file from disk.

mod body_cost;
mod candidate;
mod conditions;
mod config;
mod denials;
pub mod envoy;
mod events;
mod file;
mod geoip;
mod grpc;
mod headers;
mod identity;
mod key_mask;
pub mod limits;
mod lint;
mod listen;
mod mistake;
mod parse;
mod plans;
mod privacy;
mod proxy;
pub mod quota;
mod quotas;
mod record;
mod redis;
pub mod report;
mod reservations;
mod response_cost;
mod response_listener;
mod rules;
mod secrets;
mod shutdown;
mod source_span;
mod store;
mod top;
pub mod value;
pub mod yaml;

pub use candidate::CandidateConfig;
pub use conditions::entry_name;
pub use config::Config;
pub use denials::DenialsConfig;
pub use envoy::Envoy;
pub use events::{EventFile, EventType, EventsConfig, EventsSection, WebhookConfig};
pub use file::ReadError;
pub use grpc::Grpc;
pub use headers::{Headers, LegacyHeaders};
pub use identity::Identity;
pub use key_mask::{KeyMask, NoRandomBytes};
pub use listen::{ListenAddresses, ListenerConfig, ListenerSettings, open_listener};
pub use mistake::Mistake;
pub use parse::MAX_FILE_BYTES;
pub use privacy::KeyPrivacy;
pub use proxy::{
    AccessLogConfig, Adaptive, Class, Ejection, ForwardedHeaders, Heads, HealthCheck, Proxy,
    Scheme, Slow, Timeouts, Underscores, UpstreamConfig, Url, Via,
};
pub use record::RecordConfig;
pub use redis::{Password, RedisConfig};
pub use reservations::{ReservationExpiry, ReservationsConfig, check_secrets};
pub use secrets::{AdminToken, OperatorToken, TokenScope};
pub use shutdown::ShutdownConfig;
pub use store::Snapshot;
pub use tidegate_net::MinRate;
pub use top::Top;
