//! The parsed rules file.

use std::path::PathBuf;

use tidegate_core::{MemoryBounds, RuleSet};
use tidegate_identity::GeoIpField;

use crate::{
    AdminToken, CandidateConfig, DenialsConfig, Envoy, EventsSection, Grpc, Headers, Identity,
    KeyPrivacy, ListenAddresses, ListenerSettings, Mistake, OperatorToken, Proxy, RecordConfig,
    RedisConfig, ReservationsConfig, ShutdownConfig, Snapshot, Top, quota::QuotaRule,
};

/// The parsed rules file. The default value corresponds to an empty file: every listener on its
/// default port, the memory store, and no rules.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Config {
    /// `listen`: the addresses of the listeners.
    pub listen: ListenAddresses,
    /// `listen`: connection limits, TLS and authentication of the listeners.
    pub listeners: ListenerSettings,
    /// `store.memory`: the maximum number of keys in the memory store, and its maximum size in
    /// bytes.
    pub memory: MemoryBounds,
    /// `store.memory.snapshot`: the file that keeps the counters across restarts; `None` means that
    /// counters are not saved.
    pub snapshot: Option<Snapshot>,
    /// `store.redis`: the Redis servers through which several nodes share counters; `None` means
    /// that the counters are kept in this process's memory.
    pub redis: Option<RedisConfig>,
    /// `headers`: the rate limit headers in responses.
    pub headers: Headers,
    /// `grpc`: the connection settings of the gRPC listener.
    pub grpc: Grpc,
    /// `shutdown`: the timing of the graceful shutdown.
    pub shutdown: ShutdownConfig,
    /// `clients` and `entries`: the settings for identifying clients.
    pub identity: Identity,
    /// `geoip`: the GeoIP databases, each with the entry that it provides. Paths are relative to
    /// the server's working directory.
    pub geoip: Vec<(GeoIpField, PathBuf)>,
    /// `admin`: the token that the admin listener requires.
    pub admin_token: AdminToken,
    /// `admin.tokens`: additional tokens for the admin listener, with names and scopes.
    pub operator_tokens: Vec<OperatorToken>,
    /// `privacy`: how keys appear in lists of keys.
    pub key_privacy: KeyPrivacy,
    /// `top`: the maximum number of keys in the top talkers, and the maximum memory that they use.
    pub top: Top,
    /// `denials`: how many recent denials are kept in memory, and how many are logged.
    pub denials: DenialsConfig,
    /// `events`: which events are detected, and where they are sent.
    pub events: EventsSection,
    /// `record`: where requests are recorded; `None` if the file has no section `record`.
    pub record: Option<RecordConfig>,
    /// `reservations`: the maximum number of reservations, and how they expire.
    pub reservations: ReservationsConfig,
    /// `envoy`: Envoy's rate limit service; `None` if the file has no section `envoy`.
    pub envoy: Option<Envoy>,
    /// `rules` and `allow`, indexed for fast evaluation.
    pub rules: RuleSet,
    /// `candidate`: the rules that are evaluated alongside `rules` but never enforced; `None` if
    /// the file has no section `candidate`. [`Config::parse`] does not read the file with the
    /// candidate rules.
    pub candidate: Option<CandidateConfig>,
    /// `quotas`: limits that are divided among the Envoy instances that enforce them (RLQS).
    pub quotas: Vec<QuotaRule>,
    /// `proxy`: the reverse proxy; `None` if the file has no section `proxy`.
    pub proxy: Option<Proxy>,
    /// Warnings about settings that are valid, but probably do not have the effect that their
    /// author expects.
    pub warnings: Vec<Mistake>,
}
