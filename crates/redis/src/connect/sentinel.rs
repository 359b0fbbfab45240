//! Sentinels: who the primary is, and whether it still is.

use std::time::Duration;

use futures_util::future::join_all;
use redis::{Value, cmd};

use super::{
    error::ConnectError,
    handshake::{self, text},
    node::Place,
    settings::{Address, Settings},
};

/// How often the Sentinels are asked whether the primary still is one. A primary that was cut off from them does
/// not know that it was replaced, and answers as ever.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// The primary that most Sentinels name; one that answers is enough.
pub(super) async fn primary(
    settings: &Settings,
    sentinels: &[Address],
    name: &str,
) -> Result<Address, ConnectError> {
    let asked = sentinels
        .iter()
        .map(|sentinel| named_by(settings, sentinel, name));
    let mut votes: Vec<(Address, usize)> = Vec::new();
    let mut problem = "none is configured".to_owned();
    for answer in join_all(asked).await {
        match answer {
            Ok(address) => match votes.iter_mut().find(|(other, _)| *other == address) {
                Some((_, count)) => *count += 1,
                None => votes.push((address, 1)),
            },
            Err(error) => problem = error,
        }
    }
    let most = votes.into_iter().max_by_key(|(_, count)| *count);
    most.map(|(address, _)| address)
        .ok_or_else(|| ConnectError::NoPrimary {
            primary: name.to_owned(),
            problem,
        })
}

/// Ends when the Sentinels name another primary than `address`; never, where there are none.
pub(super) async fn moved(settings: &Settings, place: &Place, address: &Address) {
    let Place::Sentinels(sentinels, name) = place else {
        return std::future::pending().await;
    };
    loop {
        tokio::time::sleep(ASK_EVERY).await;
        // Sentinels that do not answer are no reason to leave a primary that does.
        if let Ok(now) = primary(settings, sentinels, name).await
            && now != *address
        {
            return;
        }
    }
}

async fn named_by(settings: &Settings, sentinel: &Address, name: &str) -> Result<Address, String> {
    let login = &settings.sentinel_login;
    let connected = handshake::open(settings, (sentinel, login), || {}).await;
    let mut connection = connected.map_err(|error| error.to_string())?;
    let question = cmd("SENTINEL")
        .arg("GET-MASTER-ADDR-BY-NAME")
        .arg(name)
        .to_owned();
    let answer = connection.send_packed_command(&question).await;
    let named = match answer.map_err(|error| format!("{sentinel}: {error}"))? {
        Value::Array(parts) => match parts.as_slice() {
            [host, port] => text(host).zip(text(port).and_then(|port| port.parse().ok())),
            _ => None,
        },
        Value::Nil => return Err(format!("{sentinel} does not know it")),
        Value::ServerError(error) => {
            return Err(format!(
                "{sentinel}: {} {}",
                error.code(),
                error.details().unwrap_or_default()
            ));
        }
        _ => None,
    };
    let (host, port) = named.ok_or_else(|| format!("{sentinel} answers what makes no sense"))?;
    Ok(sentinel.beside(&host, port))
}
