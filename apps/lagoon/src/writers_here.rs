//! Registry of this process's writers, so that a reader in the same process reads their memory without a socket. Its
//! key is the secret token of a writer's first arena, sent to readers on this host over mutual TLS: its holder may map
//! the memory.

use lagoon_protocol::TransferArena;
use lagoon_transport::direct::ExportServer;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

static HERE: Mutex<BTreeMap<Vec<u8>, Weak<ExportServer>>> = Mutex::new(BTreeMap::new());

fn here() -> MutexGuard<'static, BTreeMap<Vec<u8>, Weak<ExportServer>>> {
    HERE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn token(arenas: &[TransferArena]) -> Option<&Vec<u8>> {
    arenas.iter().find(|arena| arena.region == 0).map(|arena| &arena.token)
}

/// Registration of a writer; ends on drop.
#[derive(Debug)]
pub(crate) struct KnownHere(Option<Vec<u8>>);

impl KnownHere {
    pub(crate) fn new(arenas: &[TransferArena], server: &Arc<ExportServer>) -> Self {
        let token = token(arenas).cloned();
        token.iter().for_each(|token| _ = here().insert(token.clone(), Arc::downgrade(server)));
        Self(token)
    }
}

impl Drop for KnownHere {
    fn drop(&mut self) {
        self.0.iter().for_each(|token| _ = here().remove(token));
    }
}

/// The writer that offers these arenas, if it is in this process.
pub(crate) fn find(arenas: &[TransferArena]) -> Option<Arc<ExportServer>> {
    here().get(token(arenas)?)?.upgrade()
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_instance::TransferConfig;
    use lagoon_transfer::{Writer, WriterConfig};
    use lagoon_types::{KvDType, KvShape, ModelHash};

    /// Neither a dropped writer nor another writer's token is found.
    #[test]
    #[allow(clippy::unwrap_used, reason = "tests")]
    fn a_writer_is_known_by_its_token_while_it_lives() {
        let kv = KvShape { layers: 1, kv_heads: 1, head_dim: 8, dtype: KvDType::F32 };
        let layout = TransferConfig::new(ModelHash([3; 32]), kv, (4, 4), String::new()).unwrap().layout;
        let server = ExportServer::new(Writer::new(layout, WriterConfig::default()), Vec::new(), || 0);
        let arena = |token: u8| TransferArena { token: vec![token; 32], ..TransferArena::default() };
        let known = KnownHere::new(&[arena(7)], &server);
        assert!(find(&[arena(7)]).is_some_and(|found| Arc::ptr_eq(&found, &server)));
        assert!(find(&[arena(8)]).is_none() && find(&[]).is_none());
        drop(known);
        assert!(find(&[arena(7)]).is_none());
        let known = KnownHere::new(&[arena(7)], &server);
        drop(server);
        assert!(find(&[arena(7)]).is_none());
        drop(known);
    }
}
