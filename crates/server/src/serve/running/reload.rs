//! Reloads and reopens the files that the server uses.

use std::sync::Arc;

use super::ServerHandle;
use crate::reload::{report_inactive_blocks, report_inactive_overrides};

impl ServerHandle {
    /// Reopens the access log, the recorded requests file and the event files, because log rotation
    /// may have renamed them.
    pub(super) fn reopen(&self) {
        if let Some(log) = self.proxy.as_ref().and_then(|proxy| proxy.log()) {
            log.reopen();
        }
        if let Some(recorder) = self.limiter.recorder() {
            recorder.reopen();
        }
        if let Some(events) = self.limiter.events() {
            events.reopen();
        }
    }

    pub(super) fn reload(&self) {
        // Each reload reports its own result: in the log, on the admin listener, and as a metric.
        let reloaded = self
            .reloader
            .as_ref()
            .map(|reloader| reloader.reload("SIGHUP"));
        if let Some(Ok(_)) = reloaded {
            self.report_inactive();
        }
        if let Some(envoy) = &self.envoy {
            drop(envoy.reload());
        }
        for tls in &self.certificates {
            drop(tls.reload());
        }
        if let Some(geoip) = &self.geoip {
            drop(geoip.reload());
        }
        if self.reloader.is_none() && self.envoy.is_none() {
            tracing::warn!("no rules file to reload; start with --config FILE");
        }
    }

    pub(super) fn reload_if_changed(&self) {
        let reloaded = self.reloader.as_ref();
        let reloaded = reloaded.and_then(|reloader| reloader.reload_if_changed());
        if let Some(Ok(_)) = reloaded {
            self.report_inactive();
        }
        if let Some(envoy) = &self.envoy {
            drop(envoy.reload_if_changed());
        }
        for tls in &self.certificates {
            if tls.has_changed() {
                drop(tls.reload());
            }
        }
        if let Some(geoip) = &self.geoip {
            geoip.reload_if_changed();
        }
    }

    /// Logs the blocks and the overrides that are inactive under the active rules. This function
    /// does not wait for the result, because a slow Redis must not delay the handling of signals.
    pub(super) fn report_inactive(&self) {
        let limiter = Arc::clone(&self.limiter);
        tokio::spawn(async move {
            report_inactive_overrides(&limiter).await;
            // This function logs its error itself.
            drop(report_inactive_blocks(&limiter).await);
        });
    }
}
