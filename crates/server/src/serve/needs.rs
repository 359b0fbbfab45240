//! What a server reads at its start besides the rules file: certificates, authorities, databases of addresses.

use std::{fs, io, path::PathBuf, sync::Arc};

use tidegate_http::Place;

use super::ServeError;
use crate::{
    config::{AccessLog, Config, Identity, Proxy, TlsFiles},
    door::proxy::connector,
    geoip::{GeoIp, GeoIpError},
    link,
    net::{Behind, Tls, TlsError},
};

/// Everything that would keep a server from starting with `config` on this machine, as it is now: files that are not there, or cannot be
/// used. Reads them as the start does, and opens, writes and listens to nothing. Empty if there is nothing; addresses may
/// still be in use, and Envoy's rules are [`Folder`](crate::envoy::Folder)'s to check.
#[must_use]
pub fn hindrances(config: &Config) -> Vec<ServeError> {
    let proxy = config.proxy.as_ref();
    let certificates = [
        (Behind::Grpc, config.grpc.tls.as_ref()),
        (Behind::Proxy, proxy.and_then(|proxy| proxy.tls.as_ref())),
    ];
    let certificates = certificates.map(|(behind, files)| tls(behind, files).err());
    let mut found: Vec<ServeError> = Vec::new();
    found.extend(certificates.into_iter().flatten().map(ServeError::from));
    found.extend(proxy.into_iter().flat_map(of_proxy));
    for place in &config.geoip {
        let opened = GeoIp::open(std::slice::from_ref(place));
        found.extend(opened.err().map(ServeError::from));
    }
    let redis = config.redis.as_ref();
    found.extend(redis.and_then(|redis| link::certificates(redis).err()));
    found
}

fn of_proxy(proxy: &Proxy) -> Vec<ServeError> {
    let authorities = proxy.upstreams.iter().map(connector);
    let mut found: Vec<ServeError> = authorities
        .filter_map(|checked| checked.err().map(ServeError::from))
        .collect();
    let log = proxy.access_log.as_ref().map(has_a_place);
    found.extend(log.and_then(Result::err).map(ServeError::AccessLog));
    found
}

/// Whether the file of a log is there, or could be made.
fn has_a_place(log: &AccessLog) -> io::Result<()> {
    let Some(path) = &log.to else { return Ok(()) };
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => fs::metadata(folder).map(drop),
        _ => Ok(()),
    }
}

pub(super) fn tls(behind: Behind, files: Option<&TlsFiles>) -> Result<Option<Arc<Tls>>, TlsError> {
    let loaded = files.map(|files| Tls::load(behind, files)).transpose()?;
    Ok(loaded.map(Arc::new))
}

/// Reads the databases of addresses, if there are any, and lets `identity` know.
pub(super) fn located(
    files: &[(Place, PathBuf)],
    mut identity: Identity,
) -> Result<(Option<Arc<GeoIp>>, Identity), GeoIpError> {
    if files.is_empty() {
        return Ok((None, identity));
    }
    let geoip = GeoIp::open(files)?;
    identity.atlas = Some(geoip.atlas());
    Ok((Some(Arc::new(geoip)), identity))
}
