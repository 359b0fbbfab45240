//! The source of the rate limit service's rules: files or a control plane.

use std::sync::Arc;

use tidegate_net::prometheus::Page;

use crate::{ConfigFilesError, ConfigWatcher, RateLimitService, XdsClient};

/// The source of a [`RateLimitService`]'s rules.
#[derive(Debug)]
pub enum RuleSource {
    /// Files, which are watched for changes.
    Files(ConfigWatcher),
    /// A control plane, which sends changes.
    Xds(Arc<XdsClient>),
}

impl RuleSource {
    /// Returns the service that uses the rules.
    #[must_use]
    pub fn service(&self) -> &Arc<RateLimitService> {
        match self {
            Self::Files(watcher) => watcher.service(),
            Self::Xds(client) => client.service(),
        }
    }

    /// Reads the rules again, and returns the number of domains. Returns `None` for a control
    /// plane, which sends its rules without being asked.
    pub fn reload(&self) -> Option<Result<usize, ConfigFilesError>> {
        match self {
            Self::Files(watcher) => Some(watcher.reload()),
            Self::Xds(_) => None,
        }
    }

    /// Reloads files that have changed. Returns `None` if no file has changed.
    pub fn reload_if_changed(&self) -> Option<Result<usize, ConfigFilesError>> {
        match self {
            Self::Files(watcher) => watcher.reload_if_changed(),
            Self::Xds(_) => None,
        }
    }

    /// Returns the errors in the last received configuration. The list of errors is empty if that
    /// configuration is active.
    #[must_use]
    pub fn last_mistakes(&self) -> Vec<String> {
        match self {
            Self::Files(watcher) => watcher.last_mistakes(),
            Self::Xds(client) => client.last_mistakes(),
        }
    }

    /// Returns the warnings about the active configuration.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        match self {
            Self::Files(watcher) => watcher.warnings(),
            Self::Xds(client) => client.warnings(),
        }
    }

    /// Returns whether the service is waiting for its first configuration and must not be used
    /// before it arrives.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        match self {
            Self::Files(_) => false,
            Self::Xds(client) => client.is_waiting(),
        }
    }

    /// Returns the reason why rule changes currently cannot be received, if there is one.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        match self {
            Self::Files(_) => None,
            Self::Xds(client) => client.problem(),
        }
    }

    /// Adds the metrics of the rules and of the service to `page`.
    pub fn collect(&self, page: &mut Page<'_>) {
        match self {
            Self::Files(watcher) => watcher.collect(page),
            Self::Xds(client) => client.collect(page),
        }
    }
}
