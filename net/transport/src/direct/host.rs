//! Handing arenas, of the host's memory or of a device's, to readers on the same host: a unix socket, a token, a descriptor.

use super::PRIVATE_FOLDER_PREFIX;
use lagoon_backend::{ArenaView, DeviceError, PeerMemory, PeerRegion, SharedArena, SharedRegion};
use lagoon_protocol::TransferArena;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg, sockopt::socket_peercred,
};
use std::{
    fs::{self, File, Metadata},
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::AsFd,
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};
use subtle::ConstantTimeEq;

/// Bytes of a token.
const TOKEN_BYTES: usize = 32;
/// Time that either side waits for the other.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Readers that are served at once.
const AT_ONCE_MAX: usize = 16;

/// Errors of sharing memory between processes of a host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("{what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error("{} is no socket that Lagoon has made for this user: {why}", socket.display())]
    Place { socket: PathBuf, why: &'static str },
    #[error("the owner of the memory refused the token")]
    Refused,
    #[error("the token has {0} bytes, a token has 32")]
    Token(usize),
    #[error("the device that the memory is of is named by {0} bytes, not 16")]
    Name(usize),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn io_error(what: &'static str) -> impl Fn(io::Error) -> HostError {
    move |source| HostError::Io { what, source }
}

/// Boot id, mount namespace and user: two processes with equal ones can connect to each other's unix sockets. Empty where one of
/// them is unknown; such a process shares no memory.
#[must_use]
pub fn host_identity() -> String {
    let mounts = fs::read_link("/proc/self/ns/mnt");
    let (Some(boot), Ok(mounts)) = (boot_id(), mounts) else { return String::new() };
    format!("{boot}/{}/{}", mounts.display(), rustix_uid())
}

/// The boot id of this host's kernel, which all of its containers share; `None` where it is hidden.
#[must_use]
pub fn boot_id() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(boot.trim().to_owned()).filter(|boot| !boot.is_empty())
}

fn rustix_uid() -> u32 {
    fs::metadata("/proc/self").map_or(u32::MAX, |metadata| metadata.uid())
}

struct Offered {
    region: u32,
    token: [u8; TOKEN_BYTES],
    file: File,
}

/// Serves descriptors of arenas over a unix socket to processes that send the arena's token, until it is dropped.
#[derive(Debug)]
pub struct ArenaServer {
    socket: PathBuf,
    arenas: Vec<TransferArena>,
    stop: Arc<AtomicBool>,
}

impl ArenaServer {
    /// Listens on a new socket `socket`, in a directory `lagoon-…` that only this user may enter, and hands out arenas by the numbers of
    /// their regions.
    ///
    /// # Errors
    /// When the system refuses the socket, a descriptor or the thread.
    pub fn start(socket: &Path, arenas: &[(u32, SharedArena)]) -> Result<Self, HostError> {
        let of = |(region, arena): &(u32, SharedArena)| {
            let file = arena.read_only_file().map_err(io_error("opening an arena for reading"))?;
            Ok((TransferArena { region: *region, ..TransferArena::default() }, file))
        };
        Self::offer(socket, arenas.iter().map(of).collect::<Result<Vec<_>, HostError>>()?)
    }

    /// As [`ArenaServer::start`], for a shared device region that holds all regions. The memory is exported here, once.
    ///
    /// # Errors
    /// As there, and when the device refuses a descriptor.
    pub fn of_region(socket: &Path, region: &dyn SharedRegion) -> Result<Self, HostError> {
        let of = TransferArena { device: region.device().to_vec(), bytes: region.bytes(), ..TransferArena::default() };
        Self::offer(socket, vec![(of, File::from(region.descriptor()?))])
    }

    fn offer(socket: &Path, memory: Vec<(TransferArena, File)>) -> Result<Self, HostError> {
        let listener = UnixListener::bind(socket).map_err(io_error("listening on a unix socket"))?;
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(socket, private).map_err(io_error("making the socket private"))?;
        let (mut offered, mut reported) = (Vec::new(), Vec::new());
        for (of, file) in memory {
            let token: [u8; TOKEN_BYTES] = rand::random();
            offered.push(Offered { region: of.region, token, file });
            reported.push(TransferArena { socket: socket.display().to_string(), token: token.to_vec(), ..of });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (ending, offered) = (Arc::clone(&stop), Arc::new(offered));
        let serve = move || accept(&listener, &ending, &offered);
        thread::Builder::new().name("arenas".to_owned()).spawn(serve).map_err(io_error("starting a thread"))?;
        Ok(Self { socket: socket.to_owned(), arenas: reported, stop })
    }

    /// The arenas to announce to readers on this host, with their tokens: over mutual TLS only.
    #[must_use]
    pub fn arenas(&self) -> &[TransferArena] {
        &self.arenas
    }
}

impl Drop for ArenaServer {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        // Wakes the thread; a failure means that it has ended already.
        drop(UnixStream::connect(&self.socket));
        drop(fs::remove_file(&self.socket));
    }
}

fn accept(listener: &UnixListener, stop: &AtomicBool, offered: &Arc<Vec<Offered>>) {
    let busy = Arc::new(AtomicUsize::new(0));
    while let Ok((stream, _)) = listener.accept() {
        if stop.load(SeqCst) {
            return;
        }
        if busy.fetch_add(1, SeqCst) >= AT_ONCE_MAX {
            busy.fetch_sub(1, SeqCst);
            continue;
        }
        let (offered, done) = (Arc::clone(offered), Arc::clone(&busy));
        let serve = move || {
            if let Err(error) = hand_out(stream, &offered) {
                tracing::warn!(%error, "a reader got no shared memory");
            }
            done.fetch_sub(1, SeqCst);
        };
        if thread::Builder::new().name("arena".to_owned()).spawn(serve).is_err() {
            busy.fetch_sub(1, SeqCst);
        }
    }
}

fn hand_out(mut stream: UnixStream, offered: &[Offered]) -> Result<(), HostError> {
    stream.set_read_timeout(Some(TIMEOUT)).map_err(io_error("setting a deadline"))?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(io_error("setting a deadline"))?;
    let peer = socket_peercred(&stream).map_err(|error| io_error("asking who the reader is")(error.into()))?;
    if peer.uid.as_raw() != rustix_uid() {
        return Err(HostError::Refused);
    }
    let mut token = [0; TOKEN_BYTES];
    stream.read_exact(&mut token).map_err(io_error("reading a token"))?;
    // Every token is compared, in full.
    let same = |arena: &&Offered| bool::from(arena.token.ct_eq(&token));
    let found = offered.iter().fold(None, |found, arena| Some(arena).filter(same).or(found));
    let Some(arena) = found else {
        drop(stream.write_all(&[0]));
        return Err(HostError::Refused);
    };
    tracing::debug!(region = arena.region, "a reader maps an arena");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [arena.file.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(&stream, &[IoSlice::new(&[1])], &mut control, SendFlags::empty())
        .map(drop)
        .map_err(|error| io_error("sending a descriptor")(error.into()))
}

/// Gets the descriptor of an arena that a writer on this host offers, and maps it. Blocks for a second at most.
///
/// # Errors
/// When the writer refuses the token, or the descriptor is not of sealed memory of `bytes` bytes.
pub fn fetch_arena(offer: &TransferArena, bytes: u64) -> Result<ArenaView, HostError> {
    ArenaView::map(&fetch(offer)?, bytes).map_err(io_error("mapping the writer's memory"))
}

/// Gets the descriptor of a shared device region that a writer on this host offers, and maps it on the device of `own`. Blocks
/// for a second at most.
///
/// # Errors
/// When the writer refuses the token, or the device cannot map the memory of the descriptor.
pub fn fetch_region(offer: &TransferArena, own: &Arc<dyn SharedRegion>) -> Result<Box<dyn PeerRegion>, HostError> {
    let of = offer.device.as_slice().try_into().map_err(|_other_size| HostError::Name(offer.device.len()))?;
    Ok(Arc::clone(own).import(of, fetch(offer)?.as_fd(), offer.bytes)?)
}

/// Gets the descriptor of device memory that a creditor on this host lends, for the own device to map. Blocks for a second at
/// most.
///
/// # Errors
/// When the creditor refuses the token, or the offer has no device UUID of 16 bytes.
pub fn fetch_memory(offer: &TransferArena) -> Result<PeerMemory, HostError> {
    let device = offer.device.as_slice().try_into().map_err(|_other_size| HostError::Name(offer.device.len()))?;
    Ok(PeerMemory { device, bytes: offer.bytes, descriptor: fetch(offer)?.into() })
}

/// Checks that a path which a peer sent is that of an arena's socket. Others of this user's sockets (an agent's, a bus) must not get
/// bytes that a peer chose.
fn check_place(socket: &Path) -> Result<(), HostError> {
    let refuse = |why| Err(HostError::Place { socket: socket.to_owned(), why });
    let own = rustix_uid();
    let folder = socket.parent().filter(|folder| folder.is_absolute());
    let name = folder.and_then(Path::file_name).map(|name| name.to_string_lossy());
    let (Some(folder), Some(true)) = (folder, name.map(|name| name.starts_with(PRIVATE_FOLDER_PREFIX))) else {
        return refuse("it is not in a folder lagoon-…");
    };
    let is_private = |meta: &Metadata| meta.is_dir() && meta.uid() == own && meta.mode() & 0o077 == 0;
    if !fs::symlink_metadata(folder).is_ok_and(|meta| is_private(&meta)) {
        return refuse("its folder is not this user's alone");
    }
    let is_own = |meta: &Metadata| meta.file_type().is_socket() && meta.uid() == own;
    if !fs::symlink_metadata(socket).is_ok_and(|meta| is_own(&meta)) {
        return refuse("it is no socket of this user");
    }
    Ok(())
}

/// The descriptor that a writer hands out for an offer's token.
fn fetch(offer: &TransferArena) -> Result<File, HostError> {
    if offer.token.len() != TOKEN_BYTES {
        return Err(HostError::Token(offer.token.len()));
    }
    check_place(Path::new(&offer.socket))?;
    let mut stream = UnixStream::connect(&offer.socket).map_err(io_error("connecting to the writer's socket"))?;
    let peer = socket_peercred(&stream).map_err(|error| io_error("asking who the writer is")(error.into()))?;
    if peer.uid.as_raw() != rustix_uid() {
        return Err(HostError::Refused);
    }
    stream.set_read_timeout(Some(TIMEOUT)).map_err(io_error("setting a deadline"))?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(io_error("setting a deadline"))?;
    stream.write_all(&offer.token).map_err(io_error("sending the token"))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut answer = [0];
    let received = recvmsg(&stream, &mut [IoSliceMut::new(&mut answer)], &mut control, RecvFlags::CMSG_CLOEXEC);
    received.map_err(|error| io_error("receiving a descriptor")(error.into()))?;
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file = files.next().and_then(|mut files| files.next()).filter(|_| answer == [1]);
    Ok(File::from(file.ok_or(HostError::Refused)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(prefix: &str) -> tempfile::TempDir {
        tempfile::Builder::new().prefix(prefix).permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    /// A peer named any socket of this user, and its token was written there.
    #[test]
    fn only_arenas_sockets_are_connected_to() {
        let fetched = |socket: &Path| {
            let offer = TransferArena {
                token: vec![7; TOKEN_BYTES],
                socket: socket.display().to_string(),
                ..TransferArena::default()
            };
            fetch(&offer).map(drop)
        };
        let (agent, own) = (folder("agent-"), folder(PRIVATE_FOLDER_PREFIX));
        let sockets = [agent.path().join("a"), own.path().join("a")];
        let [other, arena] = sockets.each_ref().map(|socket| UnixListener::bind(socket).unwrap());
        other.set_nonblocking(true).unwrap();
        let (link, file) = (own.path().join("link"), own.path().join("file"));
        std::os::unix::fs::symlink(&sockets[0], &link).unwrap();
        File::create_new(&file).unwrap();
        for socket in [&sockets[0], &PathBuf::from("a"), &link, &file] {
            let refused = fetched(socket).unwrap_err();
            assert!(matches!(refused, HostError::Place { .. }), "{}: {refused}", socket.display());
        }
        assert_eq!(other.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody connected");
        let read = thread::spawn(move || {
            let mut token = [0; TOKEN_BYTES];
            arena.accept().unwrap().0.read_exact(&mut token).unwrap();
            token
        });
        assert!(fetched(&sockets[1]).is_err());
        assert_eq!(read.join().unwrap(), [7; TOKEN_BYTES]);
        fs::set_permissions(own.path(), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(fetched(&sockets[1]), Err(HostError::Place { .. })), "others may enter");
    }

    #[test]
    fn a_descriptor_is_handed_out_for_its_token_only() {
        let dir = folder(PRIVATE_FOLDER_PREFIX);
        let socket = dir.path().join("a.sock");
        let arenas = [(0, SharedArena::new(4096, 64).unwrap()), (1, SharedArena::new(8192, 64).unwrap())];
        arenas[1].1.fill(100, 3, &mut |target| target.copy_from_slice(b"abc")).unwrap();
        let server = ArenaServer::start(&socket, &arenas).unwrap();
        let view = fetch_arena(&server.arenas()[1], 8192).unwrap();
        let mut out = [0; 3];
        view.copy(100, &mut out, None).unwrap();
        assert_eq!(&out, b"abc");
        assert!(matches!(fetch_arena(&server.arenas()[0], 8192), Err(HostError::Io { .. })), "another size");
        let mut forged = server.arenas()[0].clone();
        forged.token[31] ^= 1;
        assert!(matches!(fetch_arena(&forged, 4096), Err(HostError::Refused)));
        forged.token.pop();
        assert!(matches!(fetch_arena(&forged, 4096), Err(HostError::Token(31))));
        let last = server.arenas()[0].clone();
        drop(server);
        assert!(fetch_arena(&last, 4096).is_err(), "nobody listens any more");
        // What was mapped stays.
        view.copy(100, &mut out, None).unwrap();
        assert!(!host_identity().is_empty() && host_identity() == host_identity());
    }
}
