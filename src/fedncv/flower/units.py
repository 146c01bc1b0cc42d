"""Files that start a part of a federation with its machine: a unit for systemd, and one for `docker compose`.

`init` and `add` write both into every part. They start the same command in the foreground; use one of them.
"""

from pathlib import Path
from textwrap import dedent

IMAGE = "fedncv-federation"  # built from containers/Dockerfile


def write_units(part: Path) -> None:
    """Write the two files into a server's or a client's part."""
    action = "server" if (part / "server.toml").exists() else "client"
    (part / f"fedncv-{action}.service").write_text(systemd(action), encoding="utf-8")
    (part / "compose.yaml").write_text(compose(action), encoding="utf-8")


def systemd(action: str) -> str:
    """Return the unit. systemd ends the keeper, which ends the rest: clients sign off at the server."""
    return dedent(f"""\
        # The {action} of a federation, started with the machine:
        #
        #   useradd --system --create-home --home-dir /var/lib/fedncv fedncv
        #   cp -r THIS_FOLDER /var/lib/fedncv/{action} && chown -R fedncv: /var/lib/fedncv/{action}
        #   cp fedncv-{action}.service /etc/systemd/system/ && systemctl enable --now fedncv-{action}
        #
        # If fedncv is installed elsewhere than in /opt/fedncv, change ExecStart.
        [Unit]
        Description=fedncv federation {action}
        Wants=network-online.target
        After=network-online.target

        [Service]
        User=fedncv
        ExecStart=/opt/fedncv/bin/fedncv federation {action} /var/lib/fedncv/{action}
        WorkingDirectory=/var/lib/fedncv/{action}
        Restart=always
        RestartSec=10
        # a setting that is wrong ends with 2: starting again would not help
        RestartPreventExitStatus=2
        KillMode=mixed
        TimeoutStopSec=30
        UMask=0077
        NoNewPrivileges=true
        CapabilityBoundingSet=
        PrivateTmp=true
        ProtectSystem=strict
        ReadWritePaths=/var/lib/fedncv/{action}
        ProtectHome=true
        ProtectKernelTunables=true
        ProtectKernelModules=true
        ProtectControlGroups=true
        RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
        RestrictSUIDSGID=true
        LockPersonality=true

        [Install]
        WantedBy=multi-user.target
        """)


def compose(action: str) -> str:
    """Return the compose file of one part on its own machine. containers/compose.yaml is for all on one host."""
    return dedent(f"""\
        # The {action} of a federation in a container. Build the image once, in a clone of fedncv:
        #
        #   docker build -f containers/Dockerfile --target federation -t {IMAGE} .
        #
        # then, in this folder:
        #
        #   export USER_ID="$(id -u):$(id -g)" && docker compose up --detach --wait
        #
        # It uses the host's network: addresses and ports are those of {action}.toml.
        name: fedncv-{action}
        services:
          {action}:
            image: {IMAGE}
            command: [{action}, /federation/{action}]
            network_mode: host
            user: "${{USER_ID:-10001:10001}}"
            init: true
            read_only: true
            cap_drop: [ALL]
            security_opt: ["no-new-privileges:true"]
            tmpfs: [/tmp, /cache]
            environment: {{HOME: /tmp}}
            volumes: [".:/federation/{action}"]
            stop_grace_period: 30s
            restart: unless-stopped
        """)
