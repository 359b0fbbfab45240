//! Entries by number, in chunks that never move: growing copies nothing, and leaves no holes behind.

use super::entry::Entry;

#[derive(Debug, Default)]
pub(super) struct Slab {
    chunks: Vec<Vec<Entry>>,
    len: usize,
}

impl Slab {
    const CHUNK: usize = 64;

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.chunks.len() * Self::CHUNK * size_of::<Entry>()
            + self.chunks.capacity() * size_of::<Vec<Entry>>()
    }

    /// Bytes that pushing entry number `number` adds.
    pub(super) fn growth_bytes(&self, number: usize) -> usize {
        if number < self.chunks.len() * Self::CHUNK {
            0
        } else {
            Self::CHUNK * size_of::<Entry>()
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.chunks.iter().flatten()
    }

    pub(super) fn push(&mut self, entry: Entry) {
        if self.len == self.chunks.len() * Self::CHUNK {
            self.chunks.push(Vec::with_capacity(Self::CHUNK));
        }
        self.chunks[self.len / Self::CHUNK].push(entry);
        self.len += 1;
    }

    /// Removes an entry; the last one takes its number.
    pub(super) fn swap_remove(&mut self, number: usize) -> Option<Entry> {
        let last = self
            .chunks
            .get_mut(self.len.checked_sub(1)? / Self::CHUNK)?
            .pop()?;
        self.len -= 1;
        // One spare chunk stays, so that coming and going at a boundary allocates nothing.
        self.chunks.truncate(self.len.div_ceil(Self::CHUNK) + 1);
        if number == self.len {
            Some(last)
        } else {
            Some(std::mem::replace(&mut self[number], last))
        }
    }
}

impl std::ops::Index<usize> for Slab {
    type Output = Entry;

    #[inline]
    fn index(&self, number: usize) -> &Entry {
        &self.chunks[number / Self::CHUNK][number % Self::CHUNK]
    }
}

impl std::ops::IndexMut<usize> for Slab {
    #[inline]
    fn index_mut(&mut self, number: usize) -> &mut Entry {
        &mut self.chunks[number / Self::CHUNK][number % Self::CHUNK]
    }
}
