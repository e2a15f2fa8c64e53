# Starts munge with the key that all nodes share, which the controller makes, and then the daemon that was named.
set -eu
key=/keys/munge.key
if [ "$(hostname)" = ctl ] && [ ! -s "$key" ]; then
    (umask 077 && head -c 128 /dev/urandom > "$key.new" && mv "$key.new" "$key")
fi
until [ -s "$key" ]; do sleep 0.1; done
# What a killed node has left: PMIx refuses a step whose folders are there already.
rm -rf /var/spool/slurmd/* /tmp/spmix_appdir_*
munged --force --key-file "$key"
exec "$@"
