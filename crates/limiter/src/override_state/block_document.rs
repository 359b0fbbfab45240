//! The stored form of a block by entries: a JSON document in Redis, or on a line of a file.

use serde_json::{Value, json};
use tidegate_core::{EntryBlock, EntryBlockError, EntryBlockTarget, EntryBlocks, Timestamp};

use super::id;

/// A block, or a removal of a block, with its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockDocument {
    target: EntryBlockTarget,
    /// The block; `None` if the block was removed.
    found: Option<EntryBlock>,
}

impl BlockDocument {
    pub(crate) fn new(target: &EntryBlockTarget, found: &EntryBlock) -> Self {
        Self {
            target: target.clone(),
            found: Some(found.clone()),
        }
    }

    pub(crate) fn removal(target: &EntryBlockTarget) -> Self {
        Self {
            target: target.clone(),
            found: None,
        }
    }

    /// Returns whether the document removes a block, or whether its block has ended at `now`.
    pub(crate) fn is_obsolete(&self, now: Timestamp) -> bool {
        let found = self.found.as_ref();
        found.is_none_or(|found| !found.is_unexpired(now))
    }

    pub(crate) fn into_block(self) -> Option<EntryBlock> {
        self.found
    }

    /// Returns the ID of the block.
    pub(crate) fn id(&self) -> Vec<u8> {
        id::of_block(&self.target)
    }

    /// Applies the change, and returns the replaced or removed block.
    pub(crate) fn apply(
        self,
        blocks: &EntryBlocks,
        now: Timestamp,
    ) -> Result<Option<EntryBlock>, EntryBlockError> {
        match self.found {
            Some(found) => blocks.set(&self.target, found, now),
            None => Ok(blocks.remove(&self.target)),
        }
    }

    /// Formats the document on one line.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let entries = self.target.entries().iter();
        let entries: Vec<Value> = entries
            .map(|entry| json!([entry.name, entry.value.to_string()]))
            .collect();
        let mut block = json!({"rule": self.target.rule(), "entries": entries});
        match &self.found {
            None => block["removed"] = true.into(),
            Some(found) => {
                block["until_us"] = json!(found.until.map(Timestamp::as_micros));
                block["reason"] = json!(found.reason);
            }
        }
        json!({"block": block}).to_string().into_bytes()
    }

    /// Reads the value of the member `block` of a document.
    pub(crate) fn read(block: &Value) -> Result<Self, String> {
        let wrong = |field: &str| format!("`block.{field}` is missing or invalid");
        let entries = block["entries"].as_array();
        let entries = entries.ok_or_else(|| wrong("entries"))?.iter();
        let pair =
            |entry: &'_ Value| Some((entry[0].as_str()?.to_owned(), entry[1].as_str()?.to_owned()));
        let entries: Option<Vec<(String, String)>> = entries.map(pair).collect();
        let entries = entries.ok_or_else(|| wrong("entries"))?;
        let pairs: Vec<(&str, &str)> = entries
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        let target = EntryBlockTarget::new(block["rule"].as_str(), &pairs);
        let target = target.map_err(|error| error.to_string())?;
        let found = (block["removed"] != true).then(|| EntryBlock {
            until: block["until_us"].as_u64().map(Timestamp::from_micros),
            reason: block["reason"].as_str().unwrap_or_default().into(),
        });
        Ok(Self { target, found })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::id::StoredId, *};

    #[test]
    fn documents_and_ids_survive_a_round_trip() {
        let found = EntryBlock {
            until: Some(Timestamp::from_micros(1_700_000_000_000_001)),
            reason: "attack \u{1F680}\n".into(),
        };
        for (rule, entries) in [
            (None, &[("ip", "203.0.113.0/24")][..]),
            (
                Some("api"),
                &[("tenant", "acme\n\""), ("ip", "2001:db8::1")],
            ),
        ] {
            let target = EntryBlockTarget::new(rule, entries).unwrap();
            let document = BlockDocument::new(&target, &found);
            let encoded = document.encode();
            assert!(!encoded.contains(&b'\n'), "a document has one line");
            let removal = BlockDocument::removal(&target);
            for document in [document, removal] {
                let value: Value = serde_json::from_slice(&document.encode()).unwrap();
                assert_eq!(BlockDocument::read(&value["block"]), Ok(document.clone()));
                let parsed = id::parse(&document.id());
                assert_eq!(parsed, Some(StoredId::Block(target.clone())));
            }
        }
    }

    #[test]
    fn a_damaged_document_is_described() {
        for (text, problem) in [
            ("{}", "`block.entries`"),
            (r#"{"entries": [["ip"]]}"#, "`block.entries`"),
            (r#"{"entries": []}"#, "1 to 16 entries"),
            (r#"{"entries": [["ip", "10.0.0.0/40"]]}"#, "entries.ip"),
        ] {
            let value = serde_json::from_str(text).unwrap();
            let error = BlockDocument::read(&value).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
