# The system of every template: the agent's user, names, what it may write. It runs as
# root inside the new root file system, without network. Everything that these scripts
# write is part of every sandbox: no secret of the host, and nothing that differs
# between two builds but by need.

# The agent's user. uid 1000 is what E2B's clients show and what volumes use.
useradd --uid 1000 --user-group --create-home --home-dir /home/user --shell /bin/bash user
passwd --quiet --delete user >/dev/null
passwd --quiet --lock user >/dev/null
printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' >/etc/sudoers.d/postern
# There is no syslog to tell.
printf 'Defaults !syslog\n' >>/etc/sudoers.d/postern
chmod 0440 /etc/sudoers.d/postern
install -d -o user -g user -m 0755 /home/user/.cache /home/user/.config

# What E2B's templates let their user write: /code, and /usr/local, where "npm install
# -g" writes. There /usr/local is open to everybody; here other users, such as those of
# MCP servers, cannot replace the programs that the agent runs. The guest's directory
# stays root's.
install -d -o user -g user -m 0777 /code
find /usr/local -path /usr/local/sbin -prune -o -exec chown -h user:user {} +
chown root:user /usr/local
chmod 1775 /usr/local # so that nobody puts another sbin there
install -d -m 0755 /run/postern /run/e2b

printf 'sandbox\n' >/etc/hostname
cat >/etc/hosts <<'END'
127.0.0.1 localhost
::1 localhost ip6-localhost ip6-loopback
127.0.1.1 sandbox
10.0.0.1 postern.internal
END
rm -f /etc/resolv.conf
printf 'nameserver 10.0.0.1\noptions timeout:5 attempts:2\n' >/etc/resolv.conf

# A template that cannot do its job must not be cached.
runuser -u user -- sudo -n true
curl --version >/dev/null
