//! Who has which slots, as a node of the cluster says it.

use redis::{Value, cmd};

use super::{
    super::{
        error::ConnectError,
        handshake::{self, Kind, text},
        settings::Address,
        slots::SLOTS,
    },
    Shared,
};

/// A run of slots and who has them, the primary first.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) servers: Vec<Address>,
}

pub(super) async fn ranges(
    shared: &Shared,
    informant: &Address,
) -> Result<Vec<Range>, ConnectError> {
    let mut connection =
        handshake::connect(&shared.settings, (informant, Kind::ClusterNode), || {}).await?;
    let question = cmd("CLUSTER").arg("SLOTS").to_owned();
    let answer = connection.send_packed_command(&question).await;
    let nonsense = |problem: String| ConnectError::Nonsense {
        address: informant.clone(),
        problem,
    };
    match answer.map_err(|error| ConnectError::from_library(informant, &error))? {
        Value::Array(entries) => {
            let ranges: Option<Vec<Range>> = entries
                .iter()
                .map(|entry| range(entry, informant))
                .collect();
            let ranges = ranges.ok_or_else(|| nonsense("CLUSTER SLOTS cannot be read".into()))?;
            match ranges.is_empty() {
                true => Err(nonsense(
                    "no node has any slot yet; create the cluster first".into(),
                )),
                false => Ok(ranges),
            }
        }
        Value::ServerError(error) => Err(ConnectError::from_library(informant, &error.into())),
        other => Err(nonsense(format!("{other:?} to CLUSTER SLOTS"))),
    }
}

/// `[first, last, [host, port, …], …]`; a host that is missing is the one that answered.
fn range(entry: &Value, informant: &Address) -> Option<Range> {
    let Value::Array(parts) = entry else {
        return None;
    };
    let [Value::Int(first), Value::Int(last), servers @ ..] = parts.as_slice() else {
        return None;
    };
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    if first > last || last >= SLOTS {
        return None;
    }
    let server = |value: &Value| {
        let Value::Array(parts) = value else {
            return None;
        };
        let [host, Value::Int(port), ..] = parts.as_slice() else {
            return None;
        };
        let host = text(host).filter(|host| !host.is_empty() && host != "?");
        let port = u16::try_from(*port).ok()?;
        Some(informant.beside(host.as_deref().unwrap_or(&informant.host), port))
    };
    let servers = servers
        .iter()
        .map(server)
        .collect::<Option<Vec<Address>>>()?;
    Some(Range {
        first,
        last,
        servers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn ranges_are_read_and_nonsense_is_not() {
        let (informant, _) = Address::parse("redis://10.0.0.1:7000").unwrap();
        let server = |host: Value, port| Value::Array(vec![host, Value::Int(port), bulk("id")]);
        let entry =
            |first, last, server| Value::Array(vec![Value::Int(first), Value::Int(last), server]);
        let read = range(
            &entry(0, 5_460, server(bulk("10.0.0.2"), 7_001)),
            &informant,
        )
        .unwrap();
        assert_eq!((read.first, read.last), (0, 5_460));
        assert_eq!(read.servers, [informant.beside("10.0.0.2", 7_001)]);
        for unnamed in [bulk(""), Value::Nil] {
            let read = range(&entry(0, 1, server(unnamed, 7_002)), &informant).unwrap();
            assert_eq!(read.servers, [informant.beside("10.0.0.1", 7_002)]);
        }
        for (first, last) in [(5, 4), (0, 16_384), (-1, 3)] {
            assert_eq!(
                range(&entry(first, last, server(bulk("h"), 1)), &informant),
                None
            );
        }
        assert_eq!(
            range(&entry(0, 1, server(bulk("h"), 70_000)), &informant),
            None
        );
        assert_eq!(range(&Value::Nil, &informant), None);
    }
}
